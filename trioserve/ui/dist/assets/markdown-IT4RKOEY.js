import{c as l,d as o}from"./chunk-437GW4PF.js";import"./chunk-2ED7XMDB.js";import"./chunk-BULEUPBY.js";import"./chunk-TH2PXRUW.js";import"./chunk-O2SBNSKC.js";import{J as a}from"./chunk-Z4W47HPD.js";import"./chunk-IB3OMPMT.js";function C(s,e){let n=s.system?[`> ${s.system.replaceAll(`
`,`
> `)}`]:[];return`${[`# ${s.title||a("Untitled")}`,...n,...e.map(M)].join(`

`)}
`}function M(s){let{role:e,content:n,attachments:i,steps:f=[],toolCalls:p,model:m}=s;if(e==="tool")return o(n);let u=f.flatMap(({content:t,calls:y})=>[t,...y.flatMap(r=>[`**${r.title}**`,o(r.arguments),...r.result?[o(r.result)]:[]])]),c=i.filter(({data:t})=>t).map(({name:t})=>`*${t}*`),$=e==="user"?l(n,i.filter(({data:t})=>!t)):n,g=p.flatMap(t=>[`**${t.name}**`,o(t.arguments)]);return[`## ${e==="assistant"&&m?`${a("Answer")} (${m})`:a(e==="user"?"You":"Answer")}`,...u,...c,$,...g].filter(Boolean).join(`

`)}export{C as asMarkdown};
