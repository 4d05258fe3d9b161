"""Membership of a closed network: its authority, certificates, invitations, revocations, and the keys between members."""
