"""A module that starts a thread when it is imported, as some libraries do."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, name="meddler", daemon=True).start()
