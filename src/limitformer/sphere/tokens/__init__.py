"""Any number of tokens: one layer, its parts, and the loop over layers and replicas."""
