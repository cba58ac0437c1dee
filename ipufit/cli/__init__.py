"""The commands of ``ipufit``: what each does, and the arguments of those that run no script."""
