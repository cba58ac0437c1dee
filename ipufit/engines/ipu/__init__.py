"""Programs for IPUs, through PopTorch: the only folder of the product that knows its API."""
