"""Schedules: small, value-free programs that say who steps when and absorbs what, as waves and snapshots.

lockstep   everybody in every step, the papers' model
paced      everybody at its own pace, in virtual time
asked      a server's rounds: it asks, waits and closes, in either
"""
