"""Published programs for IPUs, which run unmodified on the stand-in for PopTorch."""
