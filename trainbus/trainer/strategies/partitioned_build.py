"""Gives each rank its part of a model's weights, with memory for one whole weight at a time, as ZeRO 3 has them.

``deepspeed.zero.Init`` around the build does that as well, but then the task's code gets weights without elements, and
the initial values are others than with any other strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainbus.trainer.checkpoint.weights import WeightSource, load_except
from trainbus.trainer.deferred_model import DeferredModel


class PartitionedBuild:
    """A model whose deferred weights have their shape, and the memory of one element, until they are partitioned."""

    def __init__(self, model: DeferredModel, find_weights: WeightSource, device: torch.device) -> None:
        """Put all but the deferred weights onto the device; see ``make_strategy`` for the errors."""
        self.module = model.module
        weights = find_weights(self.module)
        self._model, self._device = model, device
        #: The deferred contents of parameters, by their ids.
        self._deferred = place_stand_ins(model, device)
        self.module.to(device)
        self._saved = load_except(weights, self.module, lambda tensor: isinstance(tensor, nn.Parameter))

    def partition(self, deepspeed: Any, config: Mapping[str, Any]) -> None:
        """Leave each rank its part of each weight; every rank calls it.

        Args:
            deepspeed: the package.
            config: DeepSpeed's own.
        """
        converted: Any = None
        for parameter in self.module.parameters():
            parameter.data = self._value_of(parameter)
            if converted is None:
                deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=dict(config))
                converted = parameter
            else:
                converted.convert_to_zero_parameters(param_list=[parameter])

    def _value_of(self, parameter: nn.Parameter) -> Tensor:
        """Return what the whole weight begins with."""
        if (saved := self._saved.get(id(parameter))) is not None:
            found = saved.read()
        elif (deferred := self._deferred.get(id(parameter))) is not None:
            found = self._model.materialize(deferred)
        else:
            found = parameter.detach()
        return found.to(self._device, parameter.dtype).contiguous()


def place_stand_ins(model: DeferredModel, device: torch.device) -> dict[int, nn.Parameter]:
    """Give the deferred parameters their shapes on the device, where one element counts for all; return them by id.

    So optimizers, which look at shapes and devices, can be made of them. The objects stay, for all that refers to them;
    what is returned are others, with the contents that they had.
    """
    deferred = {}
    for parameter in model.module.parameters():
        if model.is_deferred(parameter):
            one = torch.zeros((), dtype=parameter.dtype, device=device)
            other = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, other)
            deferred[id(parameter)] = other
    return deferred
