from tests.triton_device import cuda as cuda
from tests.triton_device import device as device
