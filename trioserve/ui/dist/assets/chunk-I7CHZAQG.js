import{e as r,f as n}from"./chunk-FMC4HQUY.js";function s(e){let[u,c]=r();return n(()=>{if(!e)return;let t=URL.createObjectURL(e);return c(t),()=>URL.revokeObjectURL(t)},[e]),u}export{s as a};
