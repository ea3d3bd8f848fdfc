"""Two tokens: chains of their overlap, which is a Markov chain by itself."""
