raise ImportError("as on a machine without it")
