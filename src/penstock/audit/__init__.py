"""What hidden states give away: attacks on what leaves a node, by somebody who has the same weights."""
