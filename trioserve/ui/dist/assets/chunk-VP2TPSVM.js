import{e as r,g as n}from"./chunk-FMC4HQUY.js";function s(e){let[u,o]=r();return n(()=>{if(!e)return;let t=URL.createObjectURL(e);return o(t),()=>URL.revokeObjectURL(t)},[e]),u}export{s as a};
