"""What an engine on any HTTP server for inference needs, whatever its dialect: processes, health, requests, swaps.

A kind of server says its own part in a folder of its own, as :mod:`penstock.backends.engines.served.sglang` does; see
:mod:`penstock.backends.engines.served.base.dialect` for what that is.
"""
