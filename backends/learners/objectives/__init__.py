"""The mathematics of training: pure functions over tensors, one module per term.

Axis letters: ``N`` trained tokens laid end to end; ``S`` samples of the step; ``T`` positions of a sample's response
in a padded table; ``V`` vocabulary; ``B`` pairs of a preference loss. Log-probs, KL and entropy are in nats.

Invariants:

* Nothing here knows what a micro-batch, a rank or a padded row is. A loss is ``Σ weight · value`` over tokens, and
  the weights are fixed for the whole step (:mod:`.reduction`) before anything is split. Whatever couples the tokens
  of a sample or of the step is computed over all of them at once (:mod:`.objective`), so the sum and its gradient are
  the same however the tokens are packed.
* Tokens that are not trained are not among the ``N``; where positions matter (discounts), a mask says which count,
  and a masked one has no KL, no terminal reward, no advantage of its own and no part in any mean.
* Log-probs, ratios and losses are float32, whatever the model computes in, or float64 where the arguments are.
"""
