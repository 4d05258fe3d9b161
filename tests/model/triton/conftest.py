from tests.kernels.conftest import native as native
from tests.kernels.conftest import own_cache as own_cache
from tests.triton_device import cuda as cuda
from tests.triton_device import device as device
