"""Modules with parameters and hooks."""

import types

_HOOKS = []


def register_module_forward_pre_hook(hook):
    _HOOKS.append(hook)
    return types.SimpleNamespace(remove=lambda: _HOOKS.remove(hook))


class Module:
    def parameters(self):
        for value in vars(self).values():
            if isinstance(value, Module):
                yield from value.parameters()
            elif hasattr(value, "numel"):
                yield value

    def to(self, place):
        return self

    def __call__(self, *arguments):
        for hook in _HOOKS:
            hook(self, arguments)
