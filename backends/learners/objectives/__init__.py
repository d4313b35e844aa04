"""The mathematics of training: pure functions over tensors, one module per term.

Axis letters: ``N`` trained tokens of a micro-batch, laid end to end; ``S`` samples of the step; ``V`` vocabulary.

Invariants:

* Nothing here knows what a micro-batch, a rank or a padded row is. A loss is ``Σ weight · value`` over tokens, and
  the weights are fixed for the whole step (:mod:`.reduction`) before anything is split, so the sum and its gradient
  are the same however the tokens are packed.
* Log-probs, ratios and losses are float32, whatever the model computes in.
"""
