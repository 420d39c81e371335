raise ImportError("torchvision is not installed")
