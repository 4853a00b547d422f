"""The seam to megatron-core: nothing outside this folder and the layer specs of `models/` names it."""
