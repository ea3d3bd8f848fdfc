"""[ST]: the covariance of a Transformer's tokens: its exact chain, its gradients, its limit."""
