import os

# Before the first import of Keras, which reads it once.
os.environ["KERAS_BACKEND"] = "torch"
