"""GSM's levers on vLLM 0.32, as an out-of-tree plugin: nothing in vLLM is patched.

Page selection in front of its attention back ends, a cache manager that can give back blocks of running requests,
window smoothing, and an admin endpoint. Importing this package imports nothing of vLLM.
"""
