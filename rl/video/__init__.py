"""Video world models: recorded episodes, imagined clips and their rewards, evaluation, and policies tried inside the
model.
"""
