"""The commands of ``ipufit`` that run no script: each knows its arguments and what to do."""
