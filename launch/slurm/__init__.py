"""SLURM: readable sbatch scripts from templates, checks before submission, chains, arrays, and following a job."""
