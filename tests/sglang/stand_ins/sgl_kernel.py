"""Stands in for SGLang's compiled kernel package on a CPU without AMX instructions.

There SGLang computes with plain torch operators, yet a few of its modules import functions by name from ``sgl_kernel``
when they are loaded. They belong to speculative decoding and to moves of the KV cache, which ordinary serving on a CPU
does not use, so each of them raises. Any other name is an ImportError, so that guarded imports take their own way out.
"""

from __future__ import annotations

from typing import NoReturn

__version__ = "0.0.0+cpu.stand.in"


class _Missing:
    """A kernel that nobody should call here; whoever does learns which."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self._name} has no stand-in for the CPU")


assign_draft_cache_locs_contiguous_cpu = _Missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _Missing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _Missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _Missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _Missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _Missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _Missing("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _Missing("verify_tree_greedy_cpu")
