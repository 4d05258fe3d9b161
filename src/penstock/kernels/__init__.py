"""Native CPU kernels: a C++ library, compiled when Penstock is installed, and its interface to Python."""
