from torch.nn.modules.module import Module

MODELS = {}


class DecoupledModel(Module):
    pass
