"""Point-to-point messages for all backends: matching, requests, and the fast path of small messages."""
