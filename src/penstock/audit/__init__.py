"""What hidden states reveal: attacks on what leaves a node, by an attacker with the same weights."""
