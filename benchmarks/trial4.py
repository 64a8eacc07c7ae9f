import sys; sys.path.insert(0,'benchmarks')
import trial2
from trial2 import *
mode=sys.argv[1]
if mode=='loop':
    def med2(f,n,sets,reps=3):
        for i in range(40):
            f(i%sets); torch.cuda.synchronize(); print(i,end=' ',flush=True)
        print('synced ok',flush=True)
        for i in range(200): f(i%sets)
        torch.cuda.synchronize(); print('async ok',flush=True); return 1.0
    trial2.med=med2
bench(8,4,128,64,4,None,[('R2',{})],SH=((1,131072),))
