"""One node: what it loads and from where, its part in a network, and the doors in front."""

from penstock.node.node import Drained as Drained
from penstock.node.node import Node as Node
