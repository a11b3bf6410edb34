import{c as l,d as o}from"./chunk-SQRANFLE.js";import"./chunk-TDDIJC7M.js";import"./chunk-BULEUPBY.js";import"./chunk-ZPYD4QKK.js";import"./chunk-GJFH22PB.js";import{J as a}from"./chunk-QNGD4SDY.js";import"./chunk-IB3OMPMT.js";function C(s,e){let n=s.system?[`> ${s.system.replaceAll(`
`,`
> `)}`]:[];return`${[`# ${s.title||a("Untitled")}`,...n,...e.map(M)].join(`

`)}
`}function M(s){let{role:e,content:n,attachments:i,steps:f=[],toolCalls:p,model:m}=s;if(e==="tool")return o(n);let u=f.flatMap(({content:t,calls:y})=>[t,...y.flatMap(r=>[`**${r.title}**`,o(r.arguments),...r.result?[o(r.result)]:[]])]),c=i.filter(({data:t})=>t).map(({name:t})=>`*${t}*`),$=e==="user"?l(n,i.filter(({data:t})=>!t)):n,g=p.flatMap(t=>[`**${t.name}**`,o(t.arguments)]);return[`## ${e==="assistant"&&m?`${a("Answer")} (${m})`:a(e==="user"?"You":"Answer")}`,...u,...c,$,...g].filter(Boolean).join(`

`)}export{C as asMarkdown};
