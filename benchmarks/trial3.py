import sys; sys.path.insert(0,'benchmarks')
from trial import *
check('long splits',8,4,128,64,4,1,200)
