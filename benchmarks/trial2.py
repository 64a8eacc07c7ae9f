import sys,time,torch
sys.path.insert(0,'src'); sys.path.insert(0,'benchmarks')
from trial import *
from dataclasses import replace
def med(f,n,sets,reps=7):
    f(0); torch.cuda.synchronize(); gr=torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr):
        for i in range(n): f(i%sets)
    gr.replay(); torch.cuda.synchronize(); ts=[]
    for _ in range(reps):
        a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200000); a.record(); gr.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/n*1e3)
    return sorted(ts)[len(ts)//2]
def bench(HK,G,d,N,vb,shapes,variants,SH=((1,131072),(8,32768),(32,8192),(8,131072)),seed=1):
    rope=RopeSpec(d,d,tuple(5e5**(-2*i/d) for i in range(d//2)))
    book=synthetic_codebook(HK,d//2,N,seed=seed,device=dev); lay=tier_layout(d,N,vb); opt=AttentionOptions(scale=d**-.5)
    total=8*1024*HK; pages=random_pages(lay,total,device=dev)
    turns=TurnTable.build(rope,max_positions=131072+128,device=dev)
    base=KernelShape.of_codebook(book,value_bits=vb,group=G)
    for vname,kw in variants:
        try: shp=replace(base,**kw); dec=CudaDecode(book,rope,turns,value_bits=vb,group=G,max_batch=32,shape=shp)
        except Exception as e: print(vname,'FAIL',str(e)[:100]); continue
        out=[]
        for B,T in SH:
            npg=T//128; per=B*npg*HK; sets=max(1,min(6,total//per)); perm=torch.randperm(total,device=dev)
            ls=[]
            set_bases(pages,lay,torch.zeros(total,dtype=torch.long,device=dev))
            allb=torch.zeros(total,dtype=torch.long,device=dev)
            for s in range(sets):
                ids=perm[s*per:(s+1)*per].view(HK,B,npg); allb[ids.flatten()]=(torch.arange(npg,device=dev)*128).repeat(HK*B)
                ls.append(PageLists.from_table(ids,torch.full((HK,B),npg,device=dev)))
            set_bases(pages,lay,allb); pool=PagePool(pages,PositionMode.CONTIGUOUS)
            q=torch.randn(B,HK*G,d,device=dev).bfloat16(); res=dec.empty_result(B)
            t=med(lambda i: dec.attend(q,pool,ls[i],opt,result=res),12 if B*T<2**20 else 4,sets)
            out.append(f'{t:7.1f}us {per*lay.page_bytes/t/1e6:.2f}TB/s')
        print(f'd{d} N{N} v{vb} G{G} {vname:16s}',' | '.join(out),f'{lay.page_bytes/128:.1f}B st{shp.num_stages} t{shp.teams} D{shp.double_steps}C{shp.constant_steps}',flush=True)
if __name__=='__main__':
    V=[('R2',{}),('R0',dict(register_pairs=0)),('R4',dict(register_pairs=4)),('R2 noSpread',dict(spread=False)),('R4 noSpread',dict(spread=False,register_pairs=4)),('R6 t3',dict(register_pairs=6,teams=3))]
    bench(8,4,128,64,4,None,V); bench(8,4,128,64,2,None,V)
    V=[('R2',{}),('R6',dict(register_pairs=6))]
    bench(8,8,64,32,4,None,V)
    bench(8,5,128,64,4,None,[('R0',dict(register_pairs=0)),('R2',{}),('R6t3',dict(register_pairs=6,teams=3))])
