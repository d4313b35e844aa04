"""A Hugging Face causal model that is trained on packed micro-batches, or padded ones.

Invariants:

* The model stays in evaluation mode: dropout would make the learner's log-probs differ from the engine's.
* Sequences of a micro-batch do not see each other; this is checked with the loaded weights before anything is
  trained, so one that mixes tokens outside attention is given a row for each sequence (:mod:`.layout`).
* Weights are in memory that torch allocated, never on the mapping of a file: the bits of a matrix product depend on
  the alignment, and a file that is removed or cut short would end the process.
* A parameter that two layers share is exported and saved once, under the name that the checkpoint has.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames, kept_tensors
from penstock.backends.checkpoint.hf_config import UNQUANTIZED
from penstock.backends.checkpoint.huggingface_classes import auto_class
from penstock.backends.checkpoint.open_config import open_config
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.checkpoint.vision_config import find_vision_part
from penstock.backends.learners.batch.packing import PackedTokens, divide_over_ranks, pack
from penstock.backends.learners.batch.padded_division import divide_padded
from penstock.backends.learners.batch.sequences import open_ended_sequence
from penstock.backends.learners.checkpoints.record import CheckpointError as CheckpointError
from penstock.backends.learners.objectives.logprobs import kept_logprobs, other_logprobs, token_entropy, token_logprobs
from penstock.backends.learners.torch.attention import PACKED_ATTENTION, token_inputs
from penstock.backends.learners.torch.layout import choose_layout, kept_places
from penstock.backends.learners.torch.row_products import BLOCK, multiply_in_tiles
from penstock.backends.learners.training.freezing import frozen_weights
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from penstock.backends.learners.batch.packing import Division
    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.options import LearnerOptions, LoraOptions
    from penstock.backends.learners.torch.layout import Layout
    from penstock.backends.learners.torch.lora import Adapters
    from penstock.backends.learners.torch.vision import LearnerEyes

ADAPTER_PREFIX: Final = "adapter/"
"""How names of adapters begin in the state of a trainer."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log: Final = logging.getLogger(__name__)


class TokenScores(NamedTuple):
    """Of the trained tokens of a micro-batch, float32 ``[T]``."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor | None
    """What the output head was given ``[T, H]``, in the dtype of the model; None where it was not asked for."""
    top: Tensor | None
    """Log-probs of the further tokens that were asked for ``[T, k]``; None where none were."""


class PackedModel:
    """Owns the weights that are trained."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        config = model.config.get_text_config()
        self.hidden_size = int(config.hidden_size)
        """Width of what goes into the output head."""
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        """The longest sequence that the architecture says it takes; None where it does not say."""
        self.checkpoint_names = CheckpointNames(model)
        self.adapters: Adapters | None = None
        """What is trained in place of the weights; None: the weights are."""
        self.eyes: LearnerEyes | None = None
        """None: it takes text only."""
        self.layout: Layout = "packed"
        """How it is given tokens."""
        self.notices: tuple[str, ...] = ()
        """What people should know of it."""
        self._dtype: torch.dtype | None = None
        self._token_logprobs, self._token_entropy = token_logprobs, token_entropy
        self.num_places: int | None = None
        """Attention fills contexts up to so many positions, as the engine does; None: to what there is."""

    @classmethod
    def load(cls, folder: Path, *, dtype: str, device: torch.device) -> PackedModel:
        """Read a folder that ``save_pretrained`` wrote.

        Raises:
            CheckpointError: it is no such folder, weights are missing in it, or the architecture is no causal decoder.
        """
        model = _load(folder, dtype)
        _leave_files(model)
        packed = cls(model.to(device).eval(), device)  # type: ignore[arg-type]  # to() is decorated without types
        if (part := find_vision_part(folder)) is not None:
            from penstock.backends.learners.torch.vision import LearnerEyes  # brings image processing

            packed.eyes = LearnerEyes(model, part)
        packed.check_isolation()
        return packed

    @classmethod
    def without_memory(cls, folder: Path, *, dtype: str, device: torch.device) -> PackedModel:
        """The same, but its parameters and buffers have shapes and types only, and its isolation is not checked.

        Raises:
            CheckpointError: as for :meth:`load`, as far as names and shapes tell.
        """
        return cls(_load(folder, dtype, device_map="meta"), device)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self._dtype or next(self.model.parameters()).dtype

    def freeze_facts(self, dtype: torch.dtype) -> None:
        """Before its weights are shared out over ranks, when they no longer tell what they are.

        Args:
            dtype: what it computes in.
        """
        self._dtype = dtype
        _ = self.checkpoint_names.can_rename_one_by_one  # asks the whole weights

    def divided(self, sequences: Sequence[TrainSequence], *, num_ranks: int, max_tokens: int) -> Division:
        """The micro-batches of these sequences, as its layout has them; see :func:`.divide_over_ranks`."""
        if self.layout == "padded":
            return divide_padded(sequences, num_ranks=num_ranks, max_tokens=max_tokens)
        return divide_over_ranks(sequences, num_ranks=num_ranks, max_tokens=max_tokens, hidden_size=self.hidden_size)

    def scores(
        self, packed: PackedTokens, *, temperature: float, entropy_gradient: bool, wants_hidden: bool = False
    ) -> TokenScores:
        """Log-probs and entropy of the trained tokens of a micro-batch.

        Only the places that predict a trained token go through the output head.

        Raises:
            CheckpointError: ``wants_hidden``, and the model does not call its output head as a module.
        """
        with self._head_inputs(is_wanted=wants_hidden) as inputs:
            logits = self._logits(packed)
        if wants_hidden and not inputs:
            raise CheckpointError(
                "learner.objective.critic: shared reads what goes into the output head, and "
                f"{type(self.model).__name__} does not show it; set critic: own"
            )
        targets, top = self.tensor(packed.targets), None
        if packed.kept_ids is None:
            logprobs = self._token_logprobs(logits, targets, temperature=temperature)
        else:
            logprobs = self._over_kept(logits, targets, packed.kept_ids, temperature)
        if packed.top_ids is not None:
            ids = self.tensor(packed.top_ids)
            is_known = ids < logits.shape[1]
            others = logits.gather(1, ids.where(is_known, 0)).masked_fill(~is_known, float("-inf"))
            own = logits.gather(1, targets[:, None])[:, 0]
            top = other_logprobs(logprobs, others, own, temperature=temperature)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = self._token_entropy(logits, temperature=temperature)
        return TokenScores(logprobs=logprobs, entropy=entropy, hidden=inputs[0][0] if wants_hidden else None, top=top)

    def logprobs(self, packed: PackedTokens, *, temperature: float) -> Tensor:
        """Log-probs ``[T]`` of the trained tokens of a micro-batch, float32."""
        logits = self._logits(packed)
        targets = self.tensor(packed.targets)
        if packed.kept_ids is None:
            return self._token_logprobs(logits, targets, temperature=temperature)
        return self._over_kept(logits, targets, packed.kept_ids, temperature)

    @torch.no_grad()
    def next_token_logits(self, tokens: Sequence[int]) -> Tensor:
        """What the model says after each of ``tokens [T]``: float32 ``[T, V]`` on the CPU, for the caller to keep."""
        # A few tokens at a time: compiled for one they would be compiled once more.
        with nullcontext() if self._token_logprobs is token_logprobs else torch.compiler.set_stance("force_eager"):
            return self._logits(pack([open_ended_sequence(tokens)])).float().cpu()

    def compute_as_engine(self, max_context: int) -> None:
        """Compute every row by products of one shape from here on, as the engine does with ``learner.true_on_policy``.

        Args:
            max_context: ``model.max_context``, which the engine's cache is made for.

        Raises:
            UserFault: it is not packed, or see :func:`.multiply_in_tiles`.
        """
        if self.layout != "packed":
            raise UserFault(f"learner.true_on_policy: needs packed tokens. {self.notices[0]}; set it to false")
        multiply_in_tiles(self.model)
        self.num_places = -(-max_context // BLOCK) * BLOCK

    def compile_scores(self, options: dict[str, str | int | bool | Callable[..., Any]]) -> None:
        """Compute log-probs and entropy of logits by compiled kernels from here on; see :mod:`.fused`.

        Args:
            options: of the compiler.
        """
        self._token_logprobs = torch.compile(token_logprobs, dynamic=True, options=options)
        self._token_entropy = torch.compile(token_entropy, dynamic=True, options=options)

    def adapt(self, options: LoraOptions) -> None:
        """Train low-rank adapters from here on; see :class:`.Adapters`. Before the model is divided over ranks."""
        from penstock.backends.learners.torch.lora import Adapters  # brings peft

        self.freeze_facts(self.dtype)
        self.adapters = Adapters(self.model, options)

    def freeze(self, options: LearnerOptions) -> None:
        """Leave the weights as they are that ``learner.freeze`` names. Before the model is divided over ranks.

        Raises:
            UserFault: see :func:`.frozen_weights`.
        """
        names = self.checkpoint_names
        has_names = names.can_rename_one_by_one
        weights = {
            name: list(names.rename({name: parameter.detach()})) if has_names else [name]
            for name, parameter in self.model.named_parameters()
        }
        for name in frozen_weights(options, weights):
            self.model.get_parameter(name).requires_grad_(False)

    def weights(self, read: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer by its name in memory, one after the other; one that has several names
        comes under the first. Those of adapters are added in.

        Args:
            read: where the values of a tensor are, if they are not in it; without it they come detached.
        """
        known = read or torch.Tensor.detach
        if self.adapters is not None:
            yield from self.adapters.merged(known)
            return
        yield from ((name, known(tensor)) for name, tensor in kept_tensors(self.model))

    def bare_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As :meth:`weights`, with the values that they have without adapters."""
        return self.weights() if self.adapters is None else self.adapters.base()

    def named_tensors(self) -> dict[str, Tensor]:
        """Every weight by the name that it has in a Hugging Face checkpoint, detached; see :mod:`.checkpoint_names`."""
        return self.checkpoint_names.rename(dict(self.weights()))

    def save(self, folder: Path) -> None:
        """Write config and weights in Hugging Face format."""
        with quiet_transformers():
            self.model.save_pretrained(folder)

    def tensor(self, array: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def check_isolation(self) -> None:
        """Choose how it is given tokens, so that no sequence sees another; see :func:`.choose_layout`.

        Raises:
            CheckpointError: see there.
        """
        if notice := choose_layout(self):  # pyright: ignore[reportArgumentType]  # to which this class has two names
            _log.warning("%s", notice)
            self.notices = (notice,)

    def check_length(self, sequence: TrainSequence, what: str) -> None:
        """
        Raises:
            UserFault: the sequence is longer than the model's context.
        """
        if self.max_positions is not None and len(sequence.tokens) > self.max_positions:
            raise UserFault(
                f"{what} has {len(sequence.tokens)} tokens, and the model takes at most {self.max_positions}"
            )

    @contextmanager
    def _head_inputs(self, *, is_wanted: bool) -> Generator[list[Tensor]]:
        """What the output head is given while the block runs, ``[1, T, H]``."""
        taken: list[Tensor] = []
        head = cast("nn.Module | None", self.model.get_output_embeddings())  # type: ignore[no-untyped-call]
        if not is_wanted or head is None:
            yield taken
            return

        def take(_head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            taken.append(inputs[0])

        handle = head.register_forward_pre_hook(take)
        try:
            yield taken
        finally:
            handle.remove()

    def _over_kept(self, logits: Tensor, targets: Tensor, kept: NDArray[np.int64], temperature: float) -> Tensor:
        """Log-probs ``[T]`` of each target over the tokens ``[T, W]`` that were kept for it."""
        whole = None
        if (kept[:, 0] < 0).any():
            whole = self._token_logprobs(logits, targets, temperature=temperature)
        ids = self.tensor(kept)
        of_kept, own = logits.gather(1, ids.clamp(min=0)), logits.gather(1, targets[:, None])[:, 0]
        return kept_logprobs(own, of_kept, ids, whole=whole, temperature=temperature)

    def _logits(self, packed: PackedTokens) -> Tensor:
        """``[T, V]`` in the dtype of the model."""
        inputs, places = token_inputs(
            packed, self.layout, device=self.device, dtype=self.dtype, num_places=self.num_places
        )
        if self.eyes is None and packed.looks:
            raise CheckpointError(
                f"{type(self.model).__name__} takes text only, and a prompt has images; train a model that sees "
                "(model.path), or remove data.multimodal_keys"
            )
        if self.layout == "padded":
            with kept_places(self.model, places):
                output = self.model(**inputs, use_cache=False)
        else:
            with nullcontext() if self.eyes is None else self.eyes.looking(packed, self.device):
                output = self.model(**inputs, logits_to_keep=places, use_cache=False)
        return cast("Tensor", output.logits)[0]


def _leave_files(model: PreTrainedModel) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _load(folder: Path, dtype: str, device_map: str | None = None) -> PreTrainedModel:
    if dtype not in DTYPES:
        raise CheckpointError(f"model dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json there; expected a folder that save_pretrained wrote")
    with quiet_transformers():
        try:
            config = open_config(folder)
            if getattr(config, "quantization_config", None) is not None:
                raise CheckpointError(f"{folder}: its weights are quantized, {UNQUANTIZED}")
            loaded = auto_class(folder).from_pretrained(
                folder,
                config=config,
                dtype=DTYPES[dtype],
                device_map=device_map,
                attn_implementation={"": PACKED_ATTENTION, "text_config": PACKED_ATTENTION, "vision_config": "sdpa"},
                output_loading_info=True,
                # Reported below; transformers' own error points to a table that it prints.
                ignore_mismatched_sizes=True,
            )
        except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
            raise CheckpointError(f"{folder}: transformers cannot load it as a causal model: {error}") from error
    model, found = cast("tuple[PreTrainedModel, dict[str, set[Any]]]", loaded)
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{folder}: {len(missing)} weights of the architecture are not in the checkpoint, {missing[0]} first"
        )
    if mismatched := sorted(found["mismatched_keys"]):
        name, in_file, wanted = mismatched[0]
        raise CheckpointError(
            f"{folder}: {len(mismatched)} weights have another shape than config.json says, {name} first: "
            f"{list(in_file)} in the checkpoint, {list(wanted)} in the architecture"
        )
    return model
