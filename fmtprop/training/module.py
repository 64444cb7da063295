"""The module that a user trains: the original's parameters, buffers and state, with planned training steps.

Owns the capture of the original and the list of its plans. PyTorch's own capture (``torch.compile``) decides when
another plan is needed: for another shape, another mode, other frozen parameters.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fmtprop import dnnl
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.turns import Compare
from fmtprop.errors import FmtpropError, ImportModelError, InputError, OptionError, PlanError
from fmtprop.ops.pytorch import tree_leaves, tree_map_only
from fmtprop.targets.registry import provider
from fmtprop.training.capture import training_backend
from fmtprop.training.plain import PlainCalls
from fmtprop.training.pytorch import (
    CAN_ALLOW,
    AnyBatchNorm,
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
    UserError,
    allow_capture,
    config,
    wrap_inline,
)
from fmtprop.training.step import Evaluation, TrainingStep
from fmtprop.training.views import WithViews, without_views

#: options with names of inputs or outputs, which a captured graph does not have
_NAMELESS = ("boundary", "pin")

#: errors of a capture as one graph, and errors of calls, by wrong arguments or by another reason
_UNCAPTURED = (Unsupported, UserError, ImportModelError)
_FAILED = (TorchRuntimeError, PlanError)

#: the code of the function that PyTorch captures for modules of its own, one for all of them
_AROUND = wrap_inline(print).__code__

#: hooks for all modules: as long as there are any, PyTorch runs the module, since its captures do not look for them
_FOR_ALL_MODULES = tuple(
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
)

#: PyTorch's settings that a call changes
_CONFIGURED = ("allow_rnn", "skip_nnmodule_hook_guards", "recompile_limit", "fail_on_recompile_limit_hit")

#: name of PyTorch's mark of a tensor's axes that changed in another graph
_CHANGED_AXES = "_dynamo_propagated_dynamic_indices"

#: most plans of one module; PyTorch's own limit of 8 is for graphs that should not depend on sizes
MOST_PLANS = 128


class TrainingModule(nn.Module):
    """A module with plans for forward and backward passes. :func:`fmtprop.compile` with ``training=True`` makes it.

    Its parameters, buffers and submodules are the original's, under the same names: optimisers, ``state_dict``,
    ``train`` and ``eval``, hooks on parameters and ``requires_grad_`` work on either. All other attributes and methods
    are the original's too.

    `example_inputs`: arguments of one call, which shows errors early; tensors, numbers and the generators of torch,
    numpy, Python and the module are restored afterwards. Without them, errors and plans come with the first call.
    `compare`: compares each step's plan with PyTorch's own step at its first call, and PyTorch runs the step if it is
    as fast; see :func:`fmtprop.compiling.turns.compare`. Default: plans run all steps. `steps`: each captured graph
    that needs gradients; ``steps[0].net`` is its plan, of forward and backward. If PyTorch runs the step, it is None,
    and ``steps[0].reason`` says why. `evaluations`: each captured graph that needs none. Raises UnsupportedOpError if
    an option has no meaning here, or no target can run an op.
    """

    steps: list[TrainingStep]
    evaluations: list[Evaluation]
    _plain: PlainCalls

    def __init__(
        self,
        module: nn.Module,
        example_inputs: Any,
        options: Options,
        compare: Compare | None = None,
    ) -> None:
        super().__init__()
        _check(module, options)
        self.__dict__["_how"] = options, compare
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_original"] = module
        self.__dict__.update(steps=[], evaluations=[], _plain=PlainCalls(module))

        def make_step(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> TrainingStep:
            self.steps.append(step := TrainingStep(forward, backward, outputs, options))
            step.told = self._plain.tell
            return step

        def make_evaluation(program: fx.GraphModule, _: Sequence[Any]) -> Evaluation | WithViews:
            program, views = without_views(program)
            self.evaluations.append(made := Evaluation(program, options))
            return made if views is None else WithViews(made, views)

        self.__dict__["_backend"] = training_backend(make_step, make_evaluation, options, compare=compare)
        self._capture(whole=True)
        if example_inputs is not None:
            self._prepare(example_inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the original's arguments, return its results; hooks for all modules do not see this one."""
        if self._forward_pre_hooks or self._forward_hooks or self._backward_pre_hooks or self._backward_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the original's arguments, return its results; their backward pass runs as planned."""
        if any(_FOR_ALL_MODULES) or (self._plain.known and self._plain.has(args, kwargs)):
            return self._original(*args, **kwargs)
        try:
            results = self._run(args, kwargs)
        except (*_UNCAPTURED, *_FAILED) as error:
            failed = error
        else:
            if self._is_whole:
                self._plain.learn(args, kwargs)
            return results
        # PyTorch would never capture parts again that it met with wrong arguments, so these end here, in known errors
        with _as_it_was(self._original):
            args_of_its_own, kwargs_of_its_own = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            self._original(*args_of_its_own, **kwargs_of_its_own)
        if not self._is_whole or isinstance(failed, _FAILED):
            raise failed
        self._capture(whole=False)
        try:
            results = self._run(args, kwargs)
        except ImportModelError:
            self._capture(whole=True)
            raise
        warnings.warn(
            f"torch.compile cannot capture {type(self._original).__name__} as one graph, so it runs in pieces with "
            f"Python between, each with formats of its own: {_first_lines(failed)}",
            RuntimeWarning,
            stacklevel=2,
        )
        return results

    def _capture(self, *, whole: bool) -> None:
        self.__dict__["_is_whole"] = whole
        # PyTorch takes a graph from its cache if the backend is the same object
        backend = partial(self._backend)
        made: Any = torch.compile(self._original, backend=backend, fullgraph=whole, dynamic=False)
        # hooks for all modules are for the original, not for PyTorch's module around it
        self.__dict__["_compiled"] = made.forward

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        _forget_changes_of_size(args, kwargs)
        if self._is_whole:
            _allow_capture(type(self._original).forward)
        before = {name: getattr(config, name) for name in _CONFIGURED}
        # torch.compile leaves recurrent layers to Python by default; config.patch takes 40 us, an eager step of a
        # small layer as long
        config.allow_rnn = True
        config.skip_nnmodule_hook_guards = False  # a module that gets its first hook is captured again
        if self._is_whole:  # pieces may have sizes that data choose: beyond PyTorch's limit it runs them
            config.recompile_limit, config.fail_on_recompile_limit_hit = MOST_PLANS, True
        try:
            return self._compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise InputError(
                f"{type(self._original).__name__} has {MOST_PLANS} plans: each shape of its inputs, each mode, each "
                "choice of frozen parameters and each Python number that it reads needs one. Pad the inputs to a few "
                "sizes; give numbers that change as tensors"
            ) from error
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    @property
    def nets(self) -> tuple[CompiledModel, ...]:
        """The plans of training steps, each of a forward and a backward half."""
        return tuple(step.net for step in self.steps if step.net is not None)

    def train(self, mode: bool = True) -> TrainingModule:
        """Set the mode of this module and of the original."""
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original's state."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the original's state."""
        return self._original.load_state_dict(*args, **kwargs)

    @property
    def training(self) -> bool:
        """The original's mode."""
        original: nn.Module = self._original
        return original.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:  # nn.Module sets a mode before there is one
            self._original.training = mode

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original that this module lacks."""
        return getattr(self.__dict__["_original"], name)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the original, if that has parts by index or name, such as an ``nn.Sequential``."""
        return self._original[index]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the original, which its forward pass reads, if this module lacks it."""
        if self._has(name):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the original, if this module lacks it."""
        if self._has(name):
            super().__delattr__(name)
        else:
            delattr(self._original, name)

    def _has(self, name: str) -> bool:
        return name in self.__dict__ or hasattr(type(self), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingModule:
        """Return a copy of the original for training, with plans of its own, which its calls make."""
        return TrainingModule(copy.deepcopy(self._original, memo), None, *self._how)

    def __copy__(self) -> TrainingModule:
        """Return a copy that shares parameters and buffers, with plans of its own."""
        return TrainingModule(copy.copy(self._original), None, *self._how)

    def save(self, path: Any) -> None:
        """Refuse to be saved."""
        raise self._staying("saved as a plan")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled."""
        raise self._staying("pickled")

    def _staying(self, how: str) -> ImportModelError:
        return ImportModelError(
            f"{type(self._original).__name__} compiled for training cannot be {how}: its plans are machine code of "
            "this process. Save its state_dict, or the module that it was compiled from, and compile that again"
        )

    def _prepare(self, example_inputs: Any) -> None:
        args: Sequence[Any] = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
        with _as_it_was(self._original), torch.enable_grad():
            try:
                self(*args)
            except FmtpropError:
                raise
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, FmtpropError):
                    raise error.inner_exception from error
                raise
            except TorchDynamoException as error:
                raise ImportModelError(
                    f"torch.compile cannot capture {type(self._original).__name__}: {_first_lines(error)}"
                ) from error
        dnnl.trim_heap()  # the copies of the state
        if not self.steps and not self.evaluations:
            raise ImportModelError(
                f"torch.compile captures nothing of {type(self._original).__name__}: all of it would run in PyTorch; "
                "the warning before this says why"
            )


def _check(module: Any, options: Options) -> None:
    if not isinstance(module, nn.Module):
        raise ImportModelError(f"training=True takes a torch.nn.Module, got {type(module).__name__}")
    if _is_wrapper(module):
        raise ImportModelError(
            f"training=True takes the module inside of {type(module).__name__}: compile that, and wrap the result"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ImportModelError(f"{name} has no size yet: call the module once before it is compiled")
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter and type(parameter.data) is not torch.Tensor:
            raise ImportModelError(
                f"parameter {name} is a {type(parameter.data).__name__}, whose numbers are in several processes or of "
                "another kind: compile the module first, and shard the result (fully_shard)"
            )
    for name in _NAMELESS:
        if getattr(options, name):
            raise OptionError(f"{name} cannot be given with training=True: captured graphs have other names")
    if not provider(options.target).has_training:
        raise OptionError(f"training=True needs target='onednn', got {options.target!r}")
    for name, part in module.named_modules():
        if isinstance(part, AnyBatchNorm) and part.momentum is None and part.track_running_stats:
            raise ImportModelError(
                f"module {name or 'itself'} ({type(part).__name__}): momentum=None makes running averages depend on a "
                "count in a tensor, so torch.compile cannot capture it as one graph: give it a momentum, such as 0.1"
            )


def _forget_changes_of_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Remove the mark of axes that changed in another captured graph: here they would change, too.

    AOTAutograd marks the tensors that a step with changing sizes saved or returned. The mark has no meaning for users.
    """
    given = (*args, *kwargs.values())
    if not all(isinstance(value, torch.Tensor) for value in given):
        given = tuple(tree_leaves(given))
    for value in given:
        if hasattr(value, _CHANGED_AXES):
            delattr(value, _CHANGED_AXES)


def _allow_capture(forward: Callable[..., Any]) -> None:
    """Let PyTorch capture modules of a class again.

    A call that it cannot capture, under ``torch.func`` or of a sparse tensor, ends this for all modules of the class,
    or for all of PyTorch's own.
    """
    for code in (_AROUND, getattr(inspect.unwrap(forward), "__code__", None)) if CAN_ALLOW else ():
        if code is not None:
            allow_capture(code)


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether PyTorch's data parallelism wraps a module: its own communication cannot be captured."""
    return type(module).__module__.startswith(("torch.nn.parallel.", "torch.distributed.fsdp."))


@contextmanager
def _as_it_was(module: nn.Module) -> Any:
    """Restore what a call may change: buffers, parameters (averages of others), attributes, and generators."""
    state = (*module.buffers(), *module.parameters())
    kept = [(tensor, tensor._version, tensor.detach().clone()) for tensor in state]
    # a flag says that parameters were set by the first numbers, or a buffer is assigned anew
    owned = [each for part in module.modules() for each in (part.__dict__, part._buffers, part._parameters)]
    before_call = [(names, dict(names)) for names in owned]
    own = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Generator)]
    generators = [(generator, generator.get_state()) for generator in own]
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)
            for generator, before_draws in generators:
                generator.set_state(before_draws)
            for names, values in before_call:
                for name in names.keys() - values.keys():
                    del names[name]
                names.update(values)
            with torch.no_grad():
                for tensor, version, before in kept:
                    # batch normalization changes its averages without a new version
                    if tensor._version != version or not (tensor.is_meta or torch.equal(tensor, before)):
                        tensor.copy_(before)


def _first_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()][:4]
    return "\n  ".join(lines)
