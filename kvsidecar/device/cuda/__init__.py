"""NVIDIA GPUs through the CUDA driver. `platform` has devices and imported memory, `stream` what copies, `calls` the
driver's copy functions fed with arrays, `status` the meaning of the driver's errors.
"""
