"""What the choices of ``learner.objective`` are called."""

from __future__ import annotations

from typing import Literal

Estimator = Literal[
    "grpo",
    "rloo",
    "maxrl",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "raw",
    "gae",
    "teacher",
    "uniform",
    "best_of_group",
    "threshold",
    "exponential",
]
CriticPlace = Literal["none", "own", "shared"]
PolicyLoss = Literal[
    "ppo", "gspo", "gmpo", "sapo", "cispo", "dppo_tv", "dppo_kl", "likelihood", "divergence", "dpo", "kto"
]
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
KlPlace = Literal["loss", "reward"]
OldLogprobs = Literal["engine", "recompute", "interpolate"]
Correction = Literal["none", "tis", "icepop", "mis"]
Level = Literal["token", "sequence", "geometric"]
MisMode = Literal["truncate", "clip", "mask"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
Pairing = Literal["best_worst", "all"]
PairLoss = Literal["sigmoid", "ipo"]
