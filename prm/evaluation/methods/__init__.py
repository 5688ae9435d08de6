"""Everything that answers a user's prompt, behind one interface; a benchmark never knows which it measures."""

from prm.evaluation.methods.base import Method, Request, Response
from prm.evaluation.methods.guided import Guided
from prm.evaluation.methods.icl import InContext
from prm.evaluation.methods.icl_rag import RetrievedInContext
from prm.evaluation.methods.plain import Plain

METHODS = ("plain", "icl", "icl_rag", "guided")

__all__ = ["METHODS", "Guided", "InContext", "Method", "Plain", "Request", "Response", "RetrievedInContext"]
