"""Whether tau and theta that tune themselves do as well as the best fixed ones."""
