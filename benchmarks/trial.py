import sys,time,torch,json
sys.path.insert(0,'src')
from sphkv.attention.cuda.synthetic import *
from sphkv.attention.cuda.decode import *
from sphkv.attention.cuda.geometry import KernelShape
from sphkv.attention.cuda import compiler
dev=torch.device('cuda'); t00=time.time()
torch.manual_seed(int(time.time()))
def check(name,HK,G,d,N,vb,B,pages_of,mode=PositionMode.CONTIGUOUS,opt=None,sinks=False,partial=False,shape=None,bf16q=False,seed=1,ids=None,step=1,gap=0):
    rope=RopeSpec(d,d,tuple(5e5**(-2*i/d) for i in range(d//2)))
    book=synthetic_codebook(HK,d//2,N,seed=seed,device=dev)
    lay=tier_layout(d,N,vb,mode)
    opt=opt or AttentionOptions(scale=d**-.5)
    num=torch.tensor(pages_of) if not torch.is_tensor(pages_of) else pages_of  # [HK,B]
    num=num.expand(HK,B).clone(); total=int(num.sum()); most=int(num.max())
    pages=random_pages(lay,total,device=dev)
    table=torch.zeros(HK,B,most,dtype=torch.long); perm=torch.randperm(total); at=0
    bases=torch.zeros(total,8 if mode==PositionMode.RUNS else 1,dtype=torch.long)
    cnt=torch.full((total,),128)
    for h in range(HK):
        for b in range(B):
            n=int(num[h,b]); idl=perm[at:at+n]; table[h,b,:n]=idl; at+=n
            if mode==PositionMode.RUNS:
                r=torch.randint(1,4,(n*8,)).cumsum(0)*16+3; bases[idl]=r.view(n,8)
            else: bases[idl,0]=torch.arange(n)*128+4
            if partial and n: cnt[idl[-1]]=torch.randint(1,128,(1,)); cnt[idl[0]]=torch.randint(1,128,(1,))
    set_counts(pages,cnt.to(dev)); set_bases(pages,lay,bases.to(dev) if mode==PositionMode.RUNS else bases[:,0].to(dev))
    turns=TurnTable.build(rope,max_positions=int(bases.max())+200,device=dev)
    dec=CudaDecode(book,rope,turns,value_bits=vb,group=G,max_batch=B,shape=shape)
    lists=PageLists.from_table(table.to(dev),num.to(dev))
    q=torch.randn(B,HK*G,d,device=dev)
    if bf16q: q=q.bfloat16()
    sk=torch.randn(HK*G,device=dev)*3+5 if sinks else None
    qpos=torch.full((B,),int(bases.max())+100,dtype=torch.int32,device=dev)
    res=dec.empty_result(B); worst=0; wl=0; w32=0
    for rep in range(2):
        res.output.fill_(float('nan')); res.lse.fill_(float('nan'))
        dec.attend(q,PagePool(pages,mode),lists,opt,result=res,query_positions=qpos,sink_logits=sk); torch.cuda.synchronize()
    orc=Oracle(book,rope,lay); o32=Oracle(book,rope,lay,torch.float32)
    for h in range(HK):
        for b in range(B):
            if HK*B>16 and (h*B+b)%5: continue
            pg=pages[table[h,b,:int(num[h,b])].to(dev)]
            sl=slice(h*G,(h+1)*G)
            r=orc.attend(q[b,sl],pg,h,opt,query_position=int(qpos[b]),sinks=None if sk is None else sk[sl])
            o=res.output[b,sl].double()
            if r.output.norm()==0: e=float(o.abs().max()); el=0.0 if bool((res.lse[b,sl].double()==r.lse).all()) or sk is not None else 9.9
            else:
                r32=o32.attend(q[b,sl],pg,h,opt,query_position=int(qpos[b]),sinks=None if sk is None else sk[sl]); w32=max(w32,((r32.output.double()-r.output).norm()/r.output.norm()).item())
                e=((o-r.output).norm()/r.output.norm()).item(); el=(res.lse[b,sl].double()-r.lse).abs().max().item()
            if not e<1e9: e=9e9
            if not el<1e9: el=9e9
            worst=max(worst,e); wl=max(wl,el)
    s=dec.shape
    print(f'{"ok  " if worst<5e-3 and wl<5e-3 else "FAIL"} {name:34s} err {worst:.2e} lse {wl:.2e} f32 {w32:.1e} N{s.nibbles} D{s.double_steps} C{s.constant_steps} cols{s.columns} teams{s.teams} spread{int(s.spread)} stages{s.num_stages}',flush=True)
if __name__=='__main__':
    t=time.time(); check('base d128 v4 g4',2,4,128,64,4,2,9); print('first',time.time()-t)
    check('v2',2,4,128,64,2,2,9)
    check('partial+empty ragged',2,4,128,64,4,4,torch.tensor([[3,0,1,17],[0,5,2,1]]),partial=True)
    check('runs',2,4,128,64,4,2,7,mode=PositionMode.RUNS,partial=True)
    check('long splits',1,4,128,64,4,1,300)
    check('group 8',2,8,128,64,4,2,9)
    check('group 5 v2 bf16q',2,5,128,64,2,2,9,bf16q=True)
    check('group 16',1,16,128,64,4,2,9)
    check('group 1',2,1,128,64,4,2,9)
    check('v3',2,4,128,64,3,2,9); check('v8',2,4,128,64,8,2,9); check('v16',2,4,128,64,16,2,9)
    check('d64 v4 g8',2,8,64,32,4,2,9); check('d64 v2 g4',2,4,64,32,2,2,9); check('d64 v3 g8',2,8,64,32,3,2,9); check('d64 v8',2,8,64,32,8,2,9)
    for N in (32,48,96,128): check(f'N{N}',2,4,128,N,4,2,9)
    check('window softcap sinks',2,4,128,64,4,3,9,opt=AttentionOptions(scale=128**-.5,softcap=20.,window=500),sinks=True,partial=True)
    check('all hidden',1,4,128,64,4,1,3,opt=AttentionOptions(scale=128**-.5,window=1))
    check('sinks',2,8,64,32,4,3,torch.tensor([[3,0,2]]),sinks=True)
    check('noSpread',2,4,128,64,4,2,9,shape=KernelShape(128,64,2,2,4,4,4,False))
    print('done',time.time()-t00)
