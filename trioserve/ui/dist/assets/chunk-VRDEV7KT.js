import{g as t,h as u}from"./chunk-J4TMKB53.js";function n(r=!0){let e=u(null);return t(()=>{r&&e.current?.focus()},[]),e}export{n as a};
