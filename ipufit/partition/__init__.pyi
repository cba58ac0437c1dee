from ipufit.partition.cut_layers import serialize as serialize
from ipufit.partition.cut_layers import to_dense as to_dense
from ipufit.partition.serialization import Serialization as Serialization
