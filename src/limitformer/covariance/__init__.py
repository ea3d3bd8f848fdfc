"""The covariance of a Transformer's tokens [ST]: its exact chain, its gradients, its limit."""
