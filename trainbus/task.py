"""What a user writes: one class that says what the model is, what a sample is and what the loss is."""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import json
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from contracts.datasets import FieldStatistics
from contracts.project_paths import find_import_folders

#: Exceptions of a module that every attempt to import it raises again.
PERMANENT_IMPORT_ERRORS = (SyntaxError, ImportError, NameError)
#: Fields that the default ``decode`` reads.
ROW_FIELD, CLASS_FIELD = "json", "cls"
IMAGE_FIELDS = frozenset({"png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"})


class TaskError(Exception):
    """The task cannot be used; the text says what to change in it."""

    def __init__(self, text: str, *, is_permanent: bool = True) -> None:
        """``is_permanent``: another attempt would fail alike."""
        super().__init__(text)
        self.is_permanent = is_permanent


class Task:
    """A training task. Subclass it, and give ``model`` and ``loss``, and ``decode`` unless its default fits.

    ``params`` of the request become keyword arguments of the constructor. A task holds no state
    that training changes: that lives in the model, the optimizer and the schedule, which are checkpointed.

    Random numbers: in ``model`` and ``loss`` torch, numpy and random get a new seed for each step and each of its
    slices (a logical rank in exact mode, else a rank), so dropout draws what it would have drawn in an undisturbed run.
    ``augment`` is handed a generator of its own for each sample. ``decode``, ``decode_batch`` and ``collate`` run ahead
    in a thread, or in worker processes (``training.loading.workers``), and must be pure functions of their arguments.
    """

    #: The class names of the dataset, in the order of their indices. Set after the constructor, before any other call.
    #: Example::
    #:
    #:     def model(self):
    #:         return nn.Sequential(nn.Flatten(), nn.Linear(64, len(self.classes)))
    classes: tuple[str, ...] = ()
    #: Mean, deviation and range of each numeric field, or channel, over the train split (docs/datasets.md).
    #: Set after the constructor, before any other call.
    #: Example::
    #:
    #:     def decode(self, sample):
    #:         image, label = super().decode(sample)
    #:         grey = self.statistics["l"]  # of an image: l, or r, g and b
    #:         return (image - grey.mean) / grey.std, label
    statistics: Mapping[str, FieldStatistics] = MappingProxyType({})
    #: True lets ranks use different parameters in one step (experts, routing), or some steps leave some out. It costs
    #: DDP a walk through the graph, and FSDP2 the memory for all gathered weights.
    #: Example::
    #:
    #:     find_unused_parameters = True
    find_unused_parameters: bool = False
    #: What evaluation measures besides ``metrics``, from all predictions at once: accuracy, macro_f1, auc and
    #: calibration_error; rmse, mae and r2; ndcg and mrr; perplexity and token_accuracy (docs/promotion.md).
    #: They are computed from what ``predict`` returns.
    #: Example::
    #:
    #:     kind = "classification"
    kind: Literal["classification", "regression", "ranking", "language-modelling"] | None = None
    #: The columns of a row that say what is true. A request to the served model, or to it in MLflow, need not have
    #: them: ``decode`` then gets a value that the training data has there (its smallest number, or the first class),
    #: which the answer must not depend on. Default: ``data.label_field`` of the run's request.
    #: Example::
    #:
    #:     target = "species"
    target: str | tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """Return a fresh model. Called once in a process, on every rank with the same seed.

        Required. The trainer moves it to the device, wraps it, and loads a checkpoint's weights into it.

        Example::

            def model(self):
                return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
        """
        raise TaskError(f"{type(self).__name__} needs a method model(self) that returns an nn.Module")

    def optimizer(self, model: nn.Module) -> Optimizer | Sequence[Optimizer]:
        """Return the optimizer over ``model``'s parameters. Default: AdamW with its own defaults.

        Several optimizers (Muon for matrices, AdamW for the rest), each over parameters of its own, become one with the
        groups of all: that is what ``schedule`` gets. Called once in a process, after ``model``.
        Parameters with ``requires_grad`` False (a frozen backbone) may be among them; they keep their values.

        Example::

            def optimizer(self, model):
                return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        """
        return torch.optim.AdamW(model.parameters())

    def fsdp_units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        """Return the modules that FSDP2 shards one at a time, as an auto wrap policy does; None: the repeated blocks.

        Called once in a process, with the strategy ``fsdp2`` alone.
        Each is gathered for its own forward and backward, the rest of the model with the root. Every step calls each
        of them as a module, on every rank. Repeated blocks are the entries of the outermost ``ModuleList``, and those
        of a ``Sequential`` or ``ModuleDict`` that have parts of their own and a class in common.

        Example::

            def fsdp_units(self, model):
                return [part for part in model.modules() if isinstance(part, nn.Linear)]
        """
        return None

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """Return the learning-rate schedule, stepped once a training step; None (default): a constant rate.

        Called once in a process, after ``optimizer``. ``total_steps``: of the whole run, in training steps.
        ``ReduceLROnPlateau`` is stepped after each validation, with ``retention.metric`` (``validation/loss`` unless
        the request names another). Where parameter groups need schedules of their own, ``LambdaLR`` takes a list.

        Example::

            def schedule(self, optimizer, total_steps):
                return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
        """
        return None

    def decode(self, sample: dict[str, bytes]) -> Any:
        """Turn one sample, its fields by extension (``{"png": ..., "cls": ...}``), into what ``collate`` takes.

        Called for every sample that is read: in training, evaluation and serving. Default: a row (jsonl, csv, Parquet)
        becomes a dict of its values, with the class's index as ``cls`` where there are classes. An image becomes a
        float32 tensor of shape ``[channels, height, width]`` from 0 to 1 (one channel for grey, else red, green, blue),
        and where there are classes the pair of it and the class's index.

        Example::

            def decode(self, sample):
                image, label = super().decode(sample)
                return image * 2 - 1, label
        """
        images = sorted(IMAGE_FIELDS.intersection(sample))
        if ROW_FIELD in sample and not images:
            row = json.loads(sample[ROW_FIELD])
            if isinstance(row, dict):
                return row if CLASS_FIELD not in sample else {CLASS_FIELD: int(sample[CLASS_FIELD]), **row}
        elif len(images) == 1:
            image = _decode_image(sample[images[0]])
            return (image, int(sample[CLASS_FIELD])) if CLASS_FIELD in sample else image
        raise TaskError(
            f"{type(self).__name__} needs a method decode(self, sample) that returns one example: these samples are "
            f"neither rows nor single images, their fields are {', '.join(sorted(sample))}"
        )

    def decode_batch(self, fields: dict[str, NDArray[np.uint8]]) -> Any:
        """Turn n samples, each field as ``uint8[n, size]``, into the batch that ``decode`` and ``collate`` would make.

        Optional (default: those two), and much faster where nothing has to be decoded (tokens, raw tensors). It is
        called in their place when every field has one size in all n samples, and never for training samples that
        ``augment`` varies.

        Example::

            def decode_batch(self, fields):
                images = torch.from_numpy(fields["bin"]).view(-1, 1, 8, 8) / 255
                return images, torch.from_numpy(fields["cls"][:, 0] - ord("0")).long()
        """
        raise TaskError(f"{type(self).__name__} has no decode_batch()")

    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Return a random variation of a decoded example; called for training samples alone. Default: as it is.

        Draw from ``rng`` and nothing else: its numbers are a function of (seed, epoch, sample), so the variation is the
        same for any number of ranks and after any resume. (For torch: ``torch.Generator().manual_seed(
        int(rng.integers(2**63)))``.) Runs where ``decode`` does.

        Example::

            def augment(self, example, rng):
                image, label = example
                return (image.flip(-1) if rng.random() < 0.5 else image), label
        """
        return example

    def collate(self, examples: Sequence[Any]) -> Any:
        """Turn a non-empty list of decoded examples into a batch. Default: torch's ``default_collate``.

        Called for each batch, in training and evaluation, where ``decode`` is. The batch may nest tensors in tuples,
        lists and dicts; they are moved to the device.

        Example::

            def collate(self, examples):
                images, labels = zip(*examples)
                return torch.stack(images), torch.tensor(labels)
        """
        return torch.utils.data.default_collate(list(examples))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch of n samples: a scalar tensor (shape ``[]``), the MEAN over its n samples.

        Required. Called once for each micro-batch of a training step. It must be a mean over samples because ranks and
        micro-batches hold different numbers of them: the trainer weights each by its count, so that the step is the
        exact mean over the global batch. With ``loss_weight`` it is the mean over what that counts.

        Example::

            def loss(self, model, batch):
                images, labels = batch
                return cross_entropy(model(images), labels)
        """
        raise TaskError(f"{type(self).__name__} needs a method loss(self, model, batch) that returns a scalar tensor")

    def loss_weight(self, batch: Any) -> float | Tensor:
        """Return what a batch, on the host, counts for in the mean over the global batch; default: its n samples.

        Override it where ``loss`` is a mean over something else, as the tokens of padded sequences: return their
        number (Hugging Face's ``num_items_in_batch``). The step is then the exact mean over the tokens of the global
        batch for any number of ranks. It costs one small exchange before each step. A batch of weight 0 is left out.

        Example::

            def loss_weight(self, batch):
                images, labels = batch
                return (labels != -100).sum()  # those that cross_entropy averages over
        """
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return what to measure on a batch of n samples, by name. Default: ``{"loss": self.loss(...)}``.

        Called for each batch of a validation or evaluation, without gradients. Each value is either a scalar (shape
        ``[]``), the mean over the n samples, or one value a sample (shape ``[n]``). The trainer adds them up weighted
        by n, in float64, over all batches and ranks, so the result is the exact mean over the split for every world
        size. With ``loss_weight``, scalars are weighted by it. What is no mean over samples (perplexity, F1) is
        measured for the task's ``kind``, or in ``summarize``.

        Example::

            def metrics(self, model, batch):
                images, labels = batch
                logits = model(images)
                return {"loss": cross_entropy(logits, labels, reduction="none"), "accuracy": logits.argmax(1) == labels}
        """
        return {"loss": self.loss(model, batch)}

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor] | Mapping[str, Any] | None:
        """Return what the model says of each of n samples; None (default): no predictions are kept.

        Called for each batch of an evaluation, without gradients. Either the pair (predicted, true), both of shape
        ``[n]``, or columns by name, each one value a sample: ``prediction``, ``target``, ``probabilities`` (shape ``[n,
        classes]``), and any others as metadata by which results are sliced. A ranking task adds ``query``; a
        language-modelling task returns ``nll`` (the sum over the sequence's tokens, in nats), ``tokens`` and
        ``correct`` in their place. Evaluation writes them to ``predictions.parquet`` and computes the metrics of
        ``kind`` from all of them.

        Example::

            def predict(self, model, batch):
                images, labels = batch
                probabilities = model(images).softmax(1)
                return {"prediction": probabilities.argmax(1), "target": labels, "probabilities": probabilities}
        """
        return None

    def artifacts(self) -> Mapping[str, bytes | str | Path]:
        """Return what the model needs beside its weights, by name: a tokenizer, a label map, a vocabulary.

        Default: nothing. The content, or the path of a file or folder with it. It is read once, when training begins,
        and is a part of every checkpoint: of its manifest and its hash, of the registered version, and of the folder
        that ``trainbus fetch`` writes. Names are relative paths of letters, digits, ``_``, ``-``, ``.`` and ``/``.

        Example::

            def artifacts(self):
                return {"labels.json": json.dumps(self.classes).encode()}
        """
        return {}

    def load_artifacts(self, folder: Path) -> None:
        """Read back what ``artifacts`` returned, each in the file of its name below ``folder``.

        Called before ``model`` where a checkpoint has artifacts: when it is resumed, evaluated, loaded or served.

        Example::

            def load_artifacts(self, folder):
                self.classes = tuple(json.loads((folder / "labels.json").read_text()))
        """

    def summarize(self, predictions: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        """Return metrics of your own that are no means over samples, from all predictions of the split at once.

        ``predictions`` has the columns of ``predict``, and ``id``. Called once in an evaluation, on one rank. Default:
        none.

        Example::

            def summarize(self, predictions):
                wrong = predictions["prediction"] != predictions["target"]
                return {"errors": float(wrong.sum())}
        """
        return {}

    def serve(self, model: nn.Module, batch: Any) -> Mapping[str, Any] | Tensor | None:
        """Return what a served model answers for a batch of n samples, by name; None (default): what ``predict`` gives.

        Called for each batch of requests, without gradients. Each value is a tensor whose first dimension is n, or a
        list of n texts. The samples have the fields of the request; one without a label gets class 0, and a value in
        each column of ``target``, which the answer must not depend on.

        Example::

            def serve(self, model, batch):
                images, _ = batch
                return {"class": [self.classes[index] for index in model(images).argmax(1)]}
        """
        return None


def _decode_image(content: bytes) -> Tensor:
    """Return an image as float32 of shape ``[channels, height, width]``, from 0 to 1."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def load_task(name: str, params: dict[str, Any], code_folder: Path | None) -> Task:
    """Import ``module:Class`` from the code package and make it.

    Raises:
        TaskError: it does not import, is no Task, lacks a method, or does not take ``params``.
    """
    module_name, _, class_name = name.partition(":")
    if code_folder is not None:
        if not code_folder.is_dir():
            raise TaskError(f"the code folder {code_folder.name!r} is not there", is_permanent=False)
        sys.path[:0] = map(str, find_import_folders(code_folder))
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name.partition(".")[0]:
            folders = find_import_folders(code_folder) if code_folder else []
            found = sorted({path.stem for folder in folders for path in _list_modules(folder)})
            raise TaskError(
                f"task {name!r}: there is no module {error.name!r} in the code package"
                f" (its modules: {', '.join(found) or 'none'})"
            ) from error
        raise TaskError(
            f"task {name!r} does not import: it needs the module {error.name!r}, which is not installed on the node: "
            "name its package in the project's requirements.txt"
        ) from error
    except BaseException as error:  # even a SystemExit of the user's module is a task that does not import
        traceback.print_exc()
        raise TaskError(
            f"{describe(error, code_folder)}: task {name!r} does not import",
            is_permanent=isinstance(error, PERMANENT_IMPORT_ERRORS),
        ) from error
    cls = getattr(module, class_name, None)
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        tasks = [key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, Task)]
        known = ", ".join(sorted(key for key in tasks if key != "Task")) or "none"
        problem = "is no subclass of trainbus.Task" if cls is not None else "is not there"
        raise TaskError(f"task {name!r}: {class_name} {problem} (tasks in module {module_name!r}: {known})")
    missing = [method for method in ("model", "loss") if getattr(cls, method) is getattr(Task, method)]
    if missing:
        raise TaskError(f"task {name!r}: {class_name} lacks {', '.join(f'{method}()' for method in missing)}")
    _check_params(name, cls, params)
    try:
        made: Task = cls(**params)
    except Exception as error:
        traceback.print_exc()
        text = f"{describe(error, code_folder)}: task {name!r} cannot be made with its params"
        raise TaskError(text, is_permanent=False) from error
    return made


def _list_modules(folder: Path) -> list[Path]:
    """Return the modules and packages of a folder."""
    return [*folder.glob("*.py"), *(path.parent for path in folder.glob("*/*.py"))]


def _check_params(name: str, cls: type[Task], params: Mapping[str, Any]) -> None:
    """Check that the constructor takes the params.

    Raises:
        TaskError: it does not; a similar name is suggested.
    """
    signature = inspect.signature(cls)
    try:
        signature.bind(**params)
    except TypeError as error:
        unknown = next((param for param in params if param not in signature.parameters), "")
        similar = difflib.get_close_matches(unknown, signature.parameters, 1) if unknown else []
        hint = f"; did you mean {similar[0]}?" if similar else ""
        text = f"task {name!r}: params do not fit {cls.__name__}{_without_types(signature)}: {error}{hint}"
        raise TaskError(text) from error


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)


def describe(error: BaseException, code_folder: Path | None = None) -> str:
    """Return the error in one line, with the last place in the user's own code that it came through."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code_folder is not None and Path(frame.filename).is_relative_to(code_folder):
            place = f"{Path(frame.filename).relative_to(code_folder)}:{frame.lineno}"
            return f"{text} ({place})" if frame.name == "<module>" else f"{text} ({place}, in {frame.name})"
    return text
