"""What single trainers need besides the optimizers; each module needs its trainer."""
