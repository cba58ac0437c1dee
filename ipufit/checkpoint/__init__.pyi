from ipufit.checkpoint.files import Contents as Contents
from ipufit.checkpoint.files import Files as Files
from ipufit.checkpoint.store import Store as Store
from ipufit.checkpoint.store import name_of as name_of
from ipufit.utils.codec import decode as decode
from ipufit.utils.codec import encode as encode
