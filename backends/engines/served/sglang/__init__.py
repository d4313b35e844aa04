"""Stock SGLang servers as engines: started here or running elsewhere, driven over HTTP.

This module imports nothing, so that looking for the environment or checking options costs no torch; engines are opened
by :mod:`penstock.backends.engines.served.sglang.create`.
"""
