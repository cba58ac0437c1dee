"""The options of the argument ``poptorch`` of ``compile``, on every engine.

``reading`` reads values of ``poptorch.Options`` by their public names, ``pair`` merges them into
the arguments of ``compile``, and ``report`` says what each setter does off IPUs. A new setter needs
a row in ``report``, and what the run is to know of it in ``reading``.
"""
