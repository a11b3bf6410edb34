function t(r){return r/2*3}function m(r,e){return e>0&&r.reduce((n,{text:o})=>n+o.length,0)>t(e)}export{t as a,m as b};
