"""What a training layout costs in memory and time before anybody pays for it."""
