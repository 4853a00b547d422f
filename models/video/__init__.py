"""Video tokenizers: pictures to finite codes and back, what trains them, and the perceptual distance."""
