"""`simulate`: chains and limits over many replicas, and what comes out."""
